"""The monitor page: what a store and its queries do, in a browser and for Prometheus."""
