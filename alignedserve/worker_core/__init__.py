"""What every worker's logic does alike, whichever phases it serves: its requests, iterations and reports. Pure."""
