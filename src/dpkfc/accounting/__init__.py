"""From mechanisms to epsilon: events, calibration, selection, and a ledger on disk."""
