"""Authentication of people and programs, and protection against other sites."""
