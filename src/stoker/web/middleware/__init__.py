"""What every request and answer passes: log, limits, headers."""
