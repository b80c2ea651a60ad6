"""Where jobs come from without being typed: the lines of a text file, the rows of a Google Sheet."""
