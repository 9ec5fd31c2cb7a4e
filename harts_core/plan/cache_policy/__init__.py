"""What is kept between units, in which blocks, and for how long: the exact future of a plan's cache."""
