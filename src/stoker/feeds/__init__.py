"""Sources of jobs: lines of a text file, rows of a Google Sheet."""
