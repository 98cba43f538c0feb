"""What queries tell of themselves to a store, for whoever looks from another process."""
