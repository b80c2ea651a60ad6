"""Tables and pages of text that verbs print."""
