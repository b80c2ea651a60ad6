"""Events worth a message, rate limits, and recipients."""
