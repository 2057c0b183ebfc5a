"""What one run leaves for people: report.json, report.html, samples.png, the shareable files."""
