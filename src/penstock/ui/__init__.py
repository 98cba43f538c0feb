"""The monitor page: the state of a store and its queries, in a browser and for Prometheus."""
