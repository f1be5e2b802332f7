"""The process beside each rank that sends its spool to the service. It never imports torch."""
