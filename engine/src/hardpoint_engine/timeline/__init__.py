"""What an engine did and when, as a picture: steps, phases, requests and workers over time."""
