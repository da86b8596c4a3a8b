"""Workers and nodes added and removed by load."""
