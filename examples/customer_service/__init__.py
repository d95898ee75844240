"""A customer service of five agents that find and call each other through etcd."""
