"""Takes the streams of ranks: the only place that reads wire messages."""
