"""The stable JSON, version 1: one function for each thing. ``docs/json.md`` documents every field."""
