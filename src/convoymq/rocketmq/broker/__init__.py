"""A broker of a group: topics, groups of consumers, sends, pulls, administration."""
