"""Events worth a message, how often they are sent, and who gets them."""
