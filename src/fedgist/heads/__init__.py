"""What one upload of statistics can become. All of it is post-processing of one release."""
