"""The command line: reads arguments, calls the registry or the supervisor, prints. Decides nothing itself."""
