"""How a worker sees pictures: the tower's passes, and the embeddings that they leave."""
