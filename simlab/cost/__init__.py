"""From counted bytes to milliseconds a token: link and compute, fitted to measured points."""
