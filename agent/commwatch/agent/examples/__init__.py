"""Jobs that the demonstration runs. They are copied into a repository of their own and know nothing of commwatch."""
