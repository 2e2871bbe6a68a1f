"""Client protocols of a node: what all of them implement, and the ports that some of them share."""
