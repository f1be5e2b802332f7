"""Sees every collective of the process and says what it was and why it was issued."""
