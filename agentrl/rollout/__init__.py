"""Playing episodes: the turn loop, what becomes of its turns, groups and their scores."""
