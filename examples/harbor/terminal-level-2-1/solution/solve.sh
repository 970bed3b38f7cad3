#!/bin/sh
cat logs/*.log | grep -w maple | LC_ALL=C sort -u > found.txt
