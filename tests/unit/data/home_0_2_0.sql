BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0007');
CREATE TABLE changes (
	id INTEGER NOT NULL, 
	count INTEGER NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "changes" VALUES(1,4);
CREATE TABLE events (
	seq INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	service VARCHAR(63) NOT NULL, 
	replica_id INTEGER, 
	kind VARCHAR(32) NOT NULL, 
	state VARCHAR(16), 
	message TEXT NOT NULL, 
	PRIMARY KEY (seq)
);
INSERT INTO "events" VALUES(1,100.0,'chat',NULL,'goal',NULL,'up: version 1');
INSERT INTO "events" VALUES(2,100.0,'llama',NULL,'goal',NULL,'up: version 1');
CREATE TABLE fingerprints (
	"key" VARCHAR(32) NOT NULL, 
	value VARCHAR(64) NOT NULL, 
	PRIMARY KEY ("key")
);
CREATE TABLE identity (
	id INTEGER NOT NULL, 
	owner VARCHAR(32) NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE kills (
	service VARCHAR(63) NOT NULL, 
	replica_id INTEGER NOT NULL, 
	PRIMARY KEY (service, replica_id)
);
CREATE TABLE lease (
	id INTEGER NOT NULL, 
	holder VARCHAR(64) NOT NULL, 
	about TEXT NOT NULL, 
	epoch BIGINT NOT NULL, 
	renewals BIGINT NOT NULL, 
	expires_at FLOAT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "lease" VALUES(1,'','',0,0,0.0);
CREATE TABLE replicas (
	service VARCHAR(63) NOT NULL, 
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	since FLOAT NOT NULL, 
	created_at FLOAT NOT NULL, 
	cloud VARCHAR(32) NOT NULL, 
	region VARCHAR(64) NOT NULL, 
	zone VARCHAR(64) NOT NULL, 
	instance_type VARCHAR(64) NOT NULL, 
	accelerator VARCHAR(64), 
	accelerator_count FLOAT NOT NULL, 
	capacity_type VARCHAR(16) NOT NULL, 
	price_usd_hour FLOAT NOT NULL, 
	on_demand_usd_hour FLOAT, 
	instance_id VARCHAR(255), 
	endpoint VARCHAR(255), 
	launched_at FLOAT, 
	ready_at FLOAT, 
	drain_by FLOAT, 
	preempt_at FLOAT, 
	ended_at FLOAT, 
	end_reason VARCHAR(16), 
	message TEXT NOT NULL, role VARCHAR(16) DEFAULT 'replica' NOT NULL, choice INTEGER DEFAULT '0' NOT NULL, retire_at FLOAT, 
	PRIMARY KEY (service, id)
);
INSERT INTO "replicas" VALUES('chat',1,1,'READY',110.0,120.0,'aws','us-east-1','us-east-1a','g6.xlarge','L4',1.0,'spot',0.3,0.8,'i-1','http://10.0.0.1:8080',111.0,120.0,NULL,NULL,NULL,NULL,'','replica',0,NULL);
INSERT INTO "replicas" VALUES('llama',1,1,'READY',110.0,120.0,'aws','us-east-1','us-east-1a','g6.xlarge','L4',1.0,'spot',0.3,0.8,'i-1','http://10.0.0.1:8080',111.0,120.0,NULL,NULL,NULL,NULL,'','replica',0,NULL);
CREATE TABLE services (
	name VARCHAR(63) NOT NULL, 
	incarnation VARCHAR(16) NOT NULL, 
	created_at FLOAT NOT NULL, 
	version INTEGER NOT NULL, 
	update_mode VARCHAR(16) NOT NULL, 
	down BOOLEAN NOT NULL, 
	purge BOOLEAN NOT NULL, 
	target INTEGER NOT NULL, 
	notes TEXT NOT NULL, 
	next_replica_id INTEGER NOT NULL, 
	memory JSON NOT NULL, 
	lb_port INTEGER NOT NULL, 
	folded_usd FLOAT NOT NULL, 
	folded_on_demand_usd FLOAT NOT NULL, wanted INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "services" VALUES('chat','0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef',100.0,1,'rolling',0,0,5,'',2,'{"placement":{},"scaling":{},"rollout":{},"balancers":{}}',30001,0.0,0.0,3);
INSERT INTO "services" VALUES('llama','0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef',100.0,1,'rolling',0,0,5,'',2,'{"placement":{},"scaling":{},"rollout":{},"balancers":{}}',30002,0.0,0.0,3);
CREATE TABLE versions (
	service VARCHAR(63) NOT NULL, 
	version INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	replica_hash VARCHAR(64) NOT NULL, 
	spec JSON NOT NULL, 
	sealed_secrets BLOB NOT NULL, 
	PRIMARY KEY (service, version)
);
INSERT INTO "versions" VALUES('chat',1,100.0,'h','{"name":"chat","run":"serve","setup":null,"probe":{"path":"/","post_data":null,"headers":[],"initial_delay_s":1200.0,"timeout_s":15.0,"interval_s":10.0,"failure_threshold_s":180.0},"replica_policy":{"min_replicas":3,"max_replicas":3,"target_qps_per_replica":null,"target_qps_by_accelerator":[],"target_ongoing_requests_per_replica":null,"load_window_s":60.0,"num_overprovision":2,"dynamic_ondemand_fallback":true,"base_ondemand_fallback_replicas":1,"spot_placer":"dynamic_fallback","availability_target":null,"price_band":0.1,"spot_price_cap":2.0,"spread_again_after_s":1800.0,"max_usd_hour":null,"upscale_delay_s":300.0,"downscale_delay_s":1200.0},"load_balancing_policy":"gorgo","load_balancer":{"stream_timeout_s":120.0,"time_to_first_byte_s":600.0,"host":null,"port":null,"stall_timeout_s":30.0,"max_body_bytes":67108864,"queue_size":1000,"queue_timeout_s":30.0,"retries":{"max_worker_retries":0,"max_total_retries":2,"budget_ratio":0.2,"budget_floor_per_s":10.0,"backoff_s":0.05,"max_backoff_s":1.0,"jitter":0.5,"slow_after_s":20.0},"breaker":{"failures":1,"errors_in_row":10,"first_s":1.0,"longest_s":30.0},"pushing":{"mode":"work","cap":32,"probe_s":0.1},"continuation":{"mode":"auto","max_breaks":3,"buffer_bytes":4194304,"handover_s":5.0},"access":{"keys":[],"overrides":true},"cors":{"origins":[],"methods":["GET","POST","DELETE"],"headers":["*"],"exposed_headers":["X-Request-Id","Retry-After"],"max_age_s":600,"credentials":false},"trusted_proxies":[],"session":{"cookie":"off"},"metrics":{"target_label":false}},"regional":{"places":[],"count":1,"instance_types":[],"port":null,"dns":null},"update":{"mode":"rolling","max_surge":1,"max_unavailable":0},"drain_timeout_s":120.0,"tls":null,"ports":[],"port":null,"envs":[],"secrets":[],"workdir":null,"workdir_git":null,"file_mounts":[],"num_nodes":1,"resources":[{"cloud":"aws","region":"us-east-1","zone":null,"accelerator":null,"accelerator_count":0.0,"use_spot":true,"instance_type":null,"cpus":null,"memory":null,"disk_size_gb":null,"disk_tier":null,"network_tier":null,"local_disk":null,"images":[],"labels":[],"max_usd_hour":null,"reservation":null},{"cloud":"gcp","region":null,"zone":null,"accelerator":null,"accelerator_count":0.0,"use_spot":true,"instance_type":null,"cpus":null,"memory":null,"disk_size_gb":null,"disk_tier":null,"network_tier":null,"local_disk":null,"images":[],"labels":[],"max_usd_hour":null,"reservation":null}],"resources_ordered":false,"event_callback":null}',X'7365616C6564');
INSERT INTO "versions" VALUES('llama',1,100.0,'h','{"name":"llama","run":"serve","setup":null,"probe":{"path":"/","post_data":null,"headers":[],"initial_delay_s":1200.0,"timeout_s":15.0,"interval_s":10.0,"failure_threshold_s":180.0},"replica_policy":{"min_replicas":1,"max_replicas":1,"target_qps_per_replica":null,"target_qps_by_accelerator":[],"target_ongoing_requests_per_replica":null,"load_window_s":60.0,"num_overprovision":0,"dynamic_ondemand_fallback":null,"base_ondemand_fallback_replicas":0,"spot_placer":null,"availability_target":null,"price_band":0.1,"spot_price_cap":2.0,"spread_again_after_s":1800.0,"max_usd_hour":null,"upscale_delay_s":300.0,"downscale_delay_s":1200.0},"load_balancing_policy":"gorgo","load_balancer":{"stream_timeout_s":33.0,"time_to_first_byte_s":55.0,"host":"0.0.0.0","port":30123,"stall_timeout_s":4.0,"max_body_bytes":7340032,"queue_size":8,"queue_timeout_s":9.0,"retries":{"max_worker_retries":0,"max_total_retries":1,"budget_ratio":0.2,"budget_floor_per_s":10.0,"backoff_s":0.05,"max_backoff_s":1.0,"jitter":0.5,"slow_after_s":20.0},"breaker":{"failures":5,"errors_in_row":10,"first_s":1.0,"longest_s":30.0},"pushing":{"mode":"fixed_cap","cap":8,"probe_s":0.1},"continuation":{"mode":"text","max_breaks":3,"buffer_bytes":4194304,"handover_s":5.0},"access":{"keys":[],"overrides":true},"cors":{"origins":["https://chat.example.com"],"methods":["GET","POST","DELETE"],"headers":["*"],"exposed_headers":["X-Request-Id","Retry-After"],"max_age_s":600,"credentials":false},"trusted_proxies":[],"session":{"cookie":"off"},"metrics":{"target_label":true}},"regional":{"places":[],"count":1,"instance_types":[],"port":null,"dns":null},"update":{"mode":"rolling","max_surge":1,"max_unavailable":0},"drain_timeout_s":120.0,"tls":null,"ports":[],"port":null,"envs":[],"secrets":[],"workdir":null,"workdir_git":null,"file_mounts":[],"num_nodes":1,"resources":[{"cloud":null,"region":null,"zone":null,"accelerator":null,"accelerator_count":0.0,"use_spot":false,"instance_type":null,"cpus":null,"memory":null,"disk_size_gb":null,"disk_tier":null,"network_tier":null,"local_disk":null,"images":[],"labels":[],"max_usd_hour":null,"reservation":null}],"resources_ordered":false,"event_callback":null}',X'7365616C6564');
CREATE INDEX ix_events_service_seq ON events (service, seq);
CREATE INDEX ix_replicas_state ON replicas (state);
COMMIT;
