"""Events worth a message, how often they are sent, and to whom."""
