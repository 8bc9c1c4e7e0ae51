"""What is known of runs at this moment, for the command line and the page."""
