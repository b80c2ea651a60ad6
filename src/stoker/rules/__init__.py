"""Rules that judge a stream of observations. Pure: no clock, no I/O."""
