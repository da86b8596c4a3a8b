"""What the cluster does at this moment, as the live page and `alignedserve top` show it."""
