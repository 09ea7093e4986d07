"""Document sources, and the token shards made from them."""
