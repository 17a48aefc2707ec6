"""What traces and results tell: summaries, and later explanations and advice."""
