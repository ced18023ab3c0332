"""The Hydra groups. This file makes them a package, so that an installed Hydra application finds them too."""
