"""What a query knows of the commits of its feed."""
