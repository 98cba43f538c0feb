"""SQL tables that streaming queries keep: anybody may query them."""
