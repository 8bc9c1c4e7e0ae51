"""What logs and messages say."""
