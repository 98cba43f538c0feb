"""Reader of rows from text: the whole input is parsed and checked before any of it is appended."""
