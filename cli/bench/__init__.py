"""`wanstream bench`: runs on one worker or several, as JSON and a page of tables."""
