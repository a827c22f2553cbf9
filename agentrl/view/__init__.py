"""What was played, for people: transcripts and reward curves."""
