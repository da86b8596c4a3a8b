"""The default beside the best of the others at every point of a grid of traces, rates, objectives and machines."""
