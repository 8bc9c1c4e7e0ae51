"""Rules that stop a run: `Run(…, stop_when=Plateau("val_loss", patience=5))`."""
