"""What a stream of readings means: pure, no clock, no I/O; every policy is a small state machine."""
