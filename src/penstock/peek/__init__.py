"""Look at the first rows of a stream, or a sample of its rows, without consuming any and without leaving
files behind.
"""
