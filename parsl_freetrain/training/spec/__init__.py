"""What a fragment trains: the order that its ranks receive, and the user's settings."""
