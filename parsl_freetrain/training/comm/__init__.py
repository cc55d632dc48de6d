"""Communication between ranks: process groups, devices, agreement on when to stop."""
