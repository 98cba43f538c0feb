"""Looking at a stream: its first rows, or a sample of them, while nothing is consumed and nothing stays
behind.
"""
