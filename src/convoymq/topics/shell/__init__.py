"""Tasks of the node that leads the metadata group, members of groups, publishers and rows."""
