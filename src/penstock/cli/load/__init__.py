"""Reading rows from text: the whole input is parsed and checked before anything is appended."""
