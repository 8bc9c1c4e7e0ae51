"""`holdfast doctor`: the machine and the launchers, measured and tried before a long run.

`machine`, `storage`, `environment` and `software` judge what was measured, `signals` sends real
signals through the real launchers, `ranks` lets the real ranks meet.
"""
