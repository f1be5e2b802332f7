"""What program runs and at which commit."""
