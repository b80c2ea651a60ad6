"""One supervised process tree: launched, contained, stopped, swept."""
