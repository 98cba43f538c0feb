"""Reading rows from text: all of the input is parsed and judged before any of it goes anywhere."""
